"""Generated tasks: what a case holds, that it fits, and which are refused; with a tokenizer of words."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from tierloop.runtime import tasks, workloads
from tierloop.runtime.models import Model, ModelShape
from tierloop.runtime.tasks import SCORED_TOKENS, TASKS, Case, Turn, text_cases
from tierloop.runtime.workloads import WorkloadError

ASKING = [name for name, task in TASKS.items() if not task.is_text]


class Words:
    """A tokenizer whose tokens are words with the space before them, breaks and marks."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        found = re.findall(r" ?\w+|\n\n|\s|[^\w\s]", text)
        return [self.words.setdefault(word, len(self.words)) for word in found]

    def decode(self, tokens: tuple[int, ...]) -> str:
        words = list(self.words)
        return "".join(words[token] for token in tokens)


@pytest.fixture(scope="module")
def model() -> Model:
    shape = ModelShape(1, 1, 1, 1, 1, 1, 1, 4096)
    return Model("words", cast(Any, None), cast(Any, Words()), shape, "")


def text_of(model: Model, case: Case) -> str:
    return str(model.tokenizer.decode(cast(Any, (*case.prompt, case.turns[0].token))))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_tokens", [200, 1024, 4096])
def test_a_case_and_what_follows_fill_the_context(task: str, num_tokens: int, model: Model) -> None:
    for case in text_cases(model, task, num_tokens, 3):
        taken = len(case.prompt) + 1 + case.num_steps
        assert num_tokens - 20 <= taken <= num_tokens


@pytest.mark.parametrize("task", ASKING)
def test_the_answer_stands_in_the_text_once_after_the_words_that_the_question_ends_with(
    task: str, model: Model
) -> None:
    for case in text_cases(model, task, 1024, 5):
        text = text_of(model, case)
        beginning = text.rpartition("\nAnswer: ")[2]
        (turn,) = case.turns
        answer = str(model.tokenizer.decode(cast(Any, turn.expected)))
        assert text.count(f"{beginning}{answer}.\n\n") == 1
        assert text.count(answer) == 1
        assert text.endswith(f"\nAnswer: {beginning}")


@pytest.mark.parametrize(("task", "sentence", "count"), [
    ("needle", r"My grandmother in \w+ has a cat whose name is (\w+)\.", 1),
    ("multi-key", r"My \w+ in \w+ has a \w+ whose name is (\w+)\.", 4),
    ("qa", r"In \w+ there is a \w+ with a \w+ whose name is (\w+)\.", 3),
])  # fmt: skip
def test_facts_about_others_stand_beside_the_one_that_is_asked_for(
    task: str, sentence: str, count: int, model: Model
) -> None:
    cases = text_cases(model, task, 1024, 6)
    asked = set()
    for case in cases:
        answers = re.findall(sentence, text_of(model, case))
        assert len(answers) == len(set(answers)) == count
        said = str(model.tokenizer.decode(cast(Any, case.turns[0].expected))).strip()
        asked.add(answers.index(said))
    assert (len(asked) > 1) == (count > 1)


def test_facts_are_spread_over_the_text(model: Model) -> None:
    for case in text_cases(model, "multi-key", 4096, 3):
        text = text_of(model, case)
        found = [match.start() / len(text) for match in re.finditer(r"whose name is \w+\.", text)]
        for number, place in enumerate(found):
            assert number / 4 - 0.05 <= place <= (number + 1) / 4 + 0.05


def test_scored_text_is_the_prose_as_it_goes_on(model: Model) -> None:
    (case,) = text_cases(model, "perplexity", 600, 1)
    (turn,) = case.turns
    assert len(turn.expected) == SCORED_TOKENS >= 32
    text = str(model.tokenizer.decode(cast(Any, (*case.prompt, turn.token, *turn.expected))))
    hay = "\n\n".join(workloads._paragraphs())
    assert text in f"{hay}\n\n{hay}"


@pytest.mark.parametrize("task", TASKS)
def test_a_case_depends_on_its_seed_and_number_alone(task: str, model: Model) -> None:
    four = text_cases(model, task, 300, 4, seed=5)
    assert text_cases(model, task, 300, 2, seed=5) == four[:2]
    assert text_cases(model, task, 300, 4, seed=6) != four
    assert len({case.prompt for case in four}) == 4


def test_what_is_fed_is_followed_by_what_is_expected() -> None:
    assert Turn(7, (1, 2, 3)).fed == (7, 1, 2)
    assert Case((9,), (Turn(7, (1, 2, 3)), Turn(4, (5,)))).num_steps == 4


def test_the_haystack_knows_nothing_of_the_facts() -> None:
    hay = "\n".join(workloads._paragraphs())
    for words in (tasks.kin, tasks.pets, tasks.people, tasks.jobs):
        assert len(set(words)) == len(words)
    for word in tasks.people:
        assert not re.search(rf"\b{word}\b", hay)


@pytest.mark.parametrize(("task", "num_tokens", "message"), [
    ("needel", 500, "task 'needel' is not one of needle, multi-key, qa, perplexity"),
    ("needle", 4097, "a context of 4097 tokens is longer than words takes, which is 4096"),
    ("multi-key", 60, "52 tokens were asked for, the facts and the question alone take"),
    ("perplexity", 33, "33 tokens were asked for; perplexity takes at least 34"),
])  # fmt: skip
def test_a_task_that_cannot_be_made_is_refused(task: str, num_tokens: int, message: str, model: Model) -> None:
    with pytest.raises(WorkloadError, match=message):
        text_cases(model, task, num_tokens, 1)
