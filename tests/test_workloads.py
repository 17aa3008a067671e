"""What a needle prompt holds, that SmolLM2 answers it, and which prompts are refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tierloop.runtime import workloads
from tierloop.runtime.models import Model, load_model
from tierloop.runtime.workloads import Workload, WorkloadError, filler, needle_prompt, read_prompt_file, text_prompt

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "models"


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return load_model(cache=CACHE)


# ---- the needle


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_answers_the_default_needle(smollm2: Model) -> None:
    workload = needle_prompt(smollm2)
    assert workload.num_tokens >= 4000
    prompt = torch.tensor([workload.token_ids])
    with torch.no_grad():
        generated = smollm2.module.generate(  # type: ignore[operator]  # transformers' stubs lose the method
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
    assert workload.is_answered_by(str(smollm2.tokenizer.decode(generated[0, workload.num_tokens :])))


@pytest.mark.model
@pytest.mark.parametrize("num_tokens", [64, 100, 1000, 4096, 8000])
@pytest.mark.parametrize("depth", [0, 0.3, 1])
def test_a_needle_prompt_has_the_length_that_was_asked_for(num_tokens: int, depth: float, smollm2: Model) -> None:
    workload = needle_prompt(smollm2, num_tokens, depth)
    assert num_tokens <= workload.num_tokens <= num_tokens + 16


@pytest.mark.model
def test_the_tokens_of_a_needle_prompt_are_those_of_its_text(smollm2: Model) -> None:
    workload = needle_prompt(smollm2, 1000)
    assert smollm2.tokenizer.encode(workload.prompt) == workload.token_ids
    assert smollm2.tokenizer.decode(workload.token_ids) == workload.prompt


@pytest.mark.model
def test_the_fact_is_there_once_and_the_question_stands_last(smollm2: Model) -> None:
    workload = needle_prompt(smollm2, 1000)
    assert workload.prompt.count(workload.fact) == 1
    assert f"\n\nQuestion: {workload.question}\nAnswer: " in workload.prompt[-200:]
    assert workload.answer not in workload.prompt[-200:]
    assert workload.answer in workload.fact
    assert workload.answer not in workload.question


@pytest.mark.model
@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_the_fact_is_hidden_near_its_depth(depth: float, smollm2: Model) -> None:
    workload = needle_prompt(smollm2, 4096, depth)
    assert workload.prompt.index(workload.fact) / len(workload.prompt) == pytest.approx(depth, abs=0.03)


@pytest.mark.model
def test_the_same_seed_gives_the_same_prompt_and_another_seed_another(smollm2: Model) -> None:
    assert needle_prompt(smollm2, 500, seed=3) == needle_prompt(smollm2, 500, seed=3)
    answers = {needle_prompt(smollm2, 100, seed=seed).answer for seed in range(10)}
    assert len(answers) > 3


def test_the_haystack_knows_nothing_of_the_needles() -> None:
    hay = "\n".join(workloads._paragraphs()).lower()
    assert len(hay) > 100_000
    assert [needle for needle in (*workloads.names, *workloads.cities, "grandmother") if needle.lower() in hay] == []


@pytest.mark.model
def test_a_needle_prompt_may_be_longer_than_the_haystack(smollm2: Model) -> None:
    longer = dataclasses.replace(smollm2, shape=dataclasses.replace(smollm2.shape, context_length=100_000))
    assert 40_000 <= needle_prompt(longer, 40_000).num_tokens <= 40_016


@pytest.mark.model
@pytest.mark.parametrize("depth", [-0.1, 1.1, float("nan")])
def test_a_depth_outside_the_prompt_is_refused(depth: float, smollm2: Model) -> None:
    with pytest.raises(WorkloadError, match=r"is outside \[0, 1\]"):
        needle_prompt(smollm2, depth=depth)


@pytest.mark.model
def test_a_needle_prompt_too_short_for_its_fact_is_refused(smollm2: Model) -> None:
    with pytest.raises(WorkloadError, match="10 tokens were asked for, the fact and its question alone take"):
        needle_prompt(smollm2, 10)


@pytest.mark.model
def test_a_needle_prompt_longer_than_the_model_is_refused_with_both_lengths(smollm2: Model) -> None:
    with pytest.raises(WorkloadError, match=r"has 8192 tokens and 24 more .* takes 8192, which leaves 8168"):
        needle_prompt(smollm2, 8192)


@pytest.mark.parametrize(
    ("said", "answered"),
    [(" Meadow.", True), ("It is called meadow", True), ("Meadows", False), ("", False)],
)
def test_an_answer_counts_as_a_word_of_its_own(said: str, answered: bool) -> None:
    assert Workload("", [], answer="Meadow").is_answered_by(said) is answered


def test_a_prompt_without_a_known_answer_is_never_answered() -> None:
    assert not Workload("Hello", [1]).is_answered_by("anything")


# ---- filler


@pytest.mark.model
@pytest.mark.parametrize("num_tokens", [0, 1, 257, 40_000])
def test_filler_has_exactly_as_many_tokens_as_asked_for(num_tokens: int, smollm2: Model) -> None:
    assert len(filler(smollm2, num_tokens)) == num_tokens


@pytest.mark.model
def test_longer_filler_begins_like_shorter_filler(smollm2: Model) -> None:
    assert filler(smollm2, 300)[:100] == filler(smollm2, 100)


# ---- the user's own text


@pytest.mark.model
def test_a_text_prompt_is_the_text_as_it_stands(smollm2: Model) -> None:
    workload = text_prompt(smollm2, "Once upon a time")
    assert workload == Workload("Once upon a time", smollm2.tokenizer.encode("Once upon a time"))
    assert workload.num_tokens == 4


@pytest.mark.model
def test_a_text_that_just_fits_is_taken_and_one_token_more_is_refused(smollm2: Model) -> None:
    text = "a" + " a" * 8181
    assert text_prompt(smollm2, text, new_tokens=10).num_tokens == 8182
    with pytest.raises(WorkloadError, match=r"has 8182 tokens and 11 more .* takes 8192, which leaves 8181"):
        text_prompt(smollm2, text, new_tokens=11)


@pytest.mark.model
def test_more_new_tokens_than_the_model_takes_leave_none_for_the_prompt(smollm2: Model) -> None:
    with pytest.raises(WorkloadError, match="which leaves 0 for the prompt"):
        text_prompt(smollm2, "Hello", new_tokens=9000)


@pytest.mark.model
@pytest.mark.parametrize(("text", "message"), [("", "empty"), (" \n", "empty"), ("\udcff", "not Unicode text")])
def test_a_text_that_says_nothing_is_refused(text: str, message: str, smollm2: Model) -> None:
    with pytest.raises(WorkloadError, match=message):
        text_prompt(smollm2, text)


@pytest.mark.parametrize(
    "stored", ["Grüße\nund mehr", "Grüße\nund mehr\n", "Grüße\nund mehr\r\n", "\ufeffGrüße\nund mehr"]
)
def test_a_prompt_file_is_read_without_marks_of_its_editor(stored: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(stored.encode())
    assert read_prompt_file(tmp_path / "prompt.txt") == "Grüße\nund mehr"


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (b"Gr\xfc\xdfe", "is not UTF-8 text: byte 2 is 0xfc"),
        (b"", "the prompt is empty"),
        (b" \n\n", "the prompt is empty"),
        (b"\xef\xbb\xbf", "the prompt is empty"),
    ],
)
def test_a_file_that_is_no_prompt_is_refused(stored: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(stored)
    with pytest.raises(WorkloadError, match=message) as refused:
        read_prompt_file(tmp_path / "prompt.txt")
    assert str(tmp_path / "prompt.txt") in str(refused.value)


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read as a prompt: No such file or directory"):
        read_prompt_file(tmp_path / "nothing.txt")


def test_a_folder_is_refused_as_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read as a prompt: Is a directory"):
        read_prompt_file(tmp_path)


def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "MAX_FILE_NBYTES", 1000)
    with pytest.raises(WorkloadError, match="holds more than 1000 bytes"):
        read_prompt_file("/dev/zero")
