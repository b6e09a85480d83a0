"""Where prompts come from: files, data sets, the paper's sets by name."""
