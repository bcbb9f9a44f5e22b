"""The code of docs/interop.md that needs Hugging Face's packages, and their classes' examples."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks

for _package in ("transformers", "accelerate", "trl"):
    pytest.importorskip(_package, reason=f"needs {_package}; `make test-interop` runs it")
pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

PAGE = ROOT / "docs" / "interop.md"
NAMES = """
import os
import torch
from tests.interop.tiny_models import Sentences, tiny_bert
torch.set_num_threads(1)
model, data = tiny_bert(), Sentences(16)
loader, optimizer = torch.utils.data.DataLoader(data, 4), torch.optim.SGD(model.parameters(), lr=0.1)
args = __import__("transformers").TrainingArguments("out", use_cpu=True, max_steps=1, report_to=[])
"""


def run(code: str, folder: Path) -> None:
    """In a process of its own, without a launcher: one rank."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in job}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", NAMES + code]
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, f"{code}\n{ran.stderr}"


def test_the_page(tmp_path: Path) -> None:
    code = [block.text for block in blocks(PAGE) if block.language == "py"]
    assert len(code) == 3
    run("\n".join(code), tmp_path)


@pytest.mark.parametrize("name", ["transformers.BaguaTrainer", "accelerate.BaguaAccelerator"])
def test_examples_of_classes(name: str, tmp_path: Path) -> None:
    module, _, last = name.rpartition(".")
    source = (ROOT / "bagua" / "interop" / f"{module}.py").read_text()
    docstring = source.split(f"class {last}(", 1)[1].split('"""')[1]
    examples = doctest.DocTestParser().get_examples(docstring)
    assert len(examples) == 3
    run("".join(example.source for example in examples), tmp_path)
