"""The first stage: prompts become the target's own answers, as tokens with a loss mask."""
