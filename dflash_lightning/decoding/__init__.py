"""Text from target and drafter: plain, and lossless speculative decoding."""
