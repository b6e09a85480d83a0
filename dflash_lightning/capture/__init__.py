"""The second stage: the target's context features of prepared texts, into a cache."""
