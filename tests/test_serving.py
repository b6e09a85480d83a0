"""The Python in docs/serving.md runs as it stands, with the software that it names, and gives the target's own text."""

import re
from pathlib import Path

import pytest
import torch
from export_helpers import TOKENS
from helpers import load_tiny, make_drafter

from dflash_lightning.decoding.decode import plain_decode
from dflash_lightning.export import export_drafter
from dflash_lightning.target import load_tokenizer

GUIDE = Path(__file__).parent.parent / "docs" / "serving.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize(
    ("number", "form", "package"), [(0, "transformers", "transformers"), (1, "zlab", "dflash.model")]
)
def test_the_python_of_the_serving_guide(number, form, package, qwen3_folder, tmp_path, capsys):
    pytest.importorskip(package)
    target, tokenizer = load_tiny(qwen3_folder), load_tokenizer(str(qwen3_folder))
    drafter = make_drafter(target, scale=3.0)
    export_drafter(drafter.state_dict(), drafter.config, tmp_path / form, form, tokens=TOKENS, dtype=torch.float32)
    assert len(SNIPPETS) == 2
    code = (
        SNIPPETS[number].replace('"TARGET"', repr(str(qwen3_folder))).replace('"DRAFTER"', repr(str(tmp_path / form)))
    )
    capsys.readouterr()
    exec(compile(code, str(GUIDE), "exec"), {})
    turns = [{"role": "user", "content": "Why is the sky blue?"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    text = plain_decode(target, ids, max_new_tokens=64, stop_ids=(2,)).token_ids
    assert capsys.readouterr().out == tokenizer.decode(text) + "\n"
