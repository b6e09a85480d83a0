"""What `fit` shows while it trains: lines in a log, without control characters, on stderr alone."""

import re

import pytest
import yaml
from fit_helpers import checkpoints, fit_config
from training_helpers import random_sample, write_cache

from dflash_lightning import progress
from dflash_lightning.training.fit import fit


@pytest.mark.slow
def test_a_log_gets_plain_lines_and_a_resume_counts_from_its_checkpoint(llama_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    samples = [random_sample(f"s{i}", 30, 6, 64, seed=i) for i in range(24)]
    cache = write_cache(tmp_path / "cache", samples, target=llama_folder, layer_ids=[1, 3], hidden_size=32)
    config = fit_config(llama_folder, cache, tmp_path, [checkpoints(tmp_path, "last", every_n_train_steps=1)])
    config["trainer"] |= {"strategy": "auto", "precision": "32-true", "log_every_n_steps": 1}
    config["trainer"]["enable_progress_bar"] = True
    file = tmp_path / "fit.yaml"
    file.write_text(yaml.safe_dump(config))
    fit(["--config", str(file), "--trainer.max_steps", "4"])
    out, err = capsys.readouterr()
    lines = re.findall(r"^fit: (\d+)/4, [\d.,]+ steps/s, \d+ s left(?:, loss (\d+\.\d\d))?$", err, re.MULTILINE)
    assert [int(step) for step, _ in lines] == [1, 2, 3, 4]
    assert all(float(loss) > 0 for _, loss in lines[1:])
    assert "fit:" not in out
    assert "\r" not in out + err
    assert "\x1b" not in out + err
    fit(["--config", str(file), "--trainer.max_steps", "6", "--resume", "auto"])
    assert re.findall(r"^fit: (\d+)/6", capsys.readouterr().err, re.MULTILINE) == ["5", "6"]
