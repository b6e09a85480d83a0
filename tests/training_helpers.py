"""Short trainings for the tests, in one process or under torchrun."""

import lightning as L

from dflash_lightning.strategy import DFlashDeepSpeedStrategy


class RecordSteps(L.Callback):
    """What each optimizer step reported: the step's loss by its outputs, by ``train/loss``, and the gradient norm
    before clipping (DeepSpeed only). One micro-batch a step gives ``losses`` the objective itself."""

    def __init__(self):
        self.losses, self.reported, self.gradient_norms = [], [], []

    def on_train_batch_end(self, trainer, _module, outputs, _batch, batch_index):
        self.losses.append(outputs["loss"].item())
        if (batch_index + 1) % trainer.accumulate_grad_batches == 0 and hasattr(trainer.model, "get_global_grad_norm"):
            self.gradient_norms.append(float(trainer.model.get_global_grad_norm()))

    def on_train_batch_start(self, trainer, _module, _batch, batch_index):
        if batch_index and batch_index % trainer.accumulate_grad_batches == 0:
            self._report(trainer)

    def on_train_epoch_end(self, trainer, _module):
        self._report(trainer)

    def _report(self, trainer):
        # Callbacks run before the module's own on_train_batch_end, hence one hook later.
        self.reported.append(trainer.callback_metrics["train/loss"].item())


def make_trainer(strategy: str, **options) -> L.Trainer:
    """A silent CPU trainer: ``plain`` (one process) or ``zero2``."""
    options = {"max_epochs": 1, "log_every_n_steps": 1, "enable_checkpointing": False, "logger": False, **options}
    return L.Trainer(
        accelerator="cpu",
        precision="32-true",
        strategy="auto" if strategy == "plain" else DFlashDeepSpeedStrategy(stage=int(strategy[-1])),
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
