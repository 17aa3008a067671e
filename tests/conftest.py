"""Shared by all tests: what is compiled once for all workers, threads of libraries, and Hypothesis profiles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".cache" / "numba"))
# Every worker has a core: more threads would spin at their barriers while others hold the cores that they wait for.
os.environ.setdefault("OMP_NUM_THREADS", "1")

collect_ignore = [] if "TIERLOOP_GUEST_MACHINE" in os.environ else ["guest"]
"""Tests of tests/guest run in a guest of tools/guest, where the real hardware is emulated."""

settings.register_profile("dev", max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile everything before there are workers: each would do it anew (a minute), and two of them that write one
    cache at the same time corrupt it (numba 4807, 9348)."""
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        folders = ("devices", "firmware_models", "emulators", "runtime", "tools")
        sources = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        compiled = [path for path in sources if re.search(r"^ *@(kernel|entry)\(", path.read_text(), re.MULTILINE)]
        names = [".".join(("tierloop", *path.relative_to(ROOT).with_suffix("").parts)) for path in compiled]
        subprocess.run([sys.executable, "-c", "import " + ", ".join(names)], check=True)


@pytest.fixture(scope="module")
def threads_for_little_work() -> Iterator[None]:
    """Launches of any size are cut and shared among as many threads as they ask for."""
    from tierloop.devices.kernels import plan, pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_CORES", 64)
        patch.setattr(pool, "_LITTLE", 0)
        patch.setattr(plan, "_FEWEST_ROWS", 1)
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a token per byte, as a transformers folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from tests.tiny import tiny_config

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)  # type: ignore[no-untyped-call]
    torch.manual_seed(3)
    LlamaForCausalLM(tiny_config(len(alphabet))).save_pretrained(folder)
    return folder


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(exit code, stdout, stderr) of a command line."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        from tierloop.tools.cli import main

        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run
