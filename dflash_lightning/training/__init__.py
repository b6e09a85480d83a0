"""The third stage: a drafter in training, under Lightning and DeepSpeed."""
