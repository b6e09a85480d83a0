"""What a drafter is worth: real decoding of many prompts, and the report."""
