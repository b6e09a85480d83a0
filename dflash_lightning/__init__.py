"""Train DFlash block-diffusion drafters: from prompts to a drafter that decodes.

The road, one module a step: ``prepare`` (prompts -> the target's answers), ``capture`` (answers -> features in a Zarr
cache), ``blocks`` (cache -> anchor blocks), ``drafter``, ``losses``, ``decoding`` (drafter -> acceptance length),
``export`` (checkpoint -> folders that serve).
"""

__version__ = "0.1.0"
