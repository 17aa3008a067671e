"""Tasks that show what a policy loses: generated prompts, and what has to follow them.

Who calls this: the accuracy harness, and whoever measures a policy in another way. Facts are hidden in real English
(the prose of workloads.py) and asked for at its end, by the beginning of a sentence whose next word is the answer: a
small base model completes text, and does not answer questions (docs/accuracy.md says what was measured). What must
hold: the same arguments give the same cases under one Python version and tokenizer; the prompt and what follows fit
into `num_tokens` together.

    needle      one fact in the prose
    multi-key   four facts of the same form, about others; one of them is asked for
    qa          three people, of whom the text says where they are and what they do; who has this job in this city?
    perplexity  no question: the prose itself goes on, and each of its tokens is scored
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierloop.runtime.models import Model
from tierloop.runtime.workloads import WorkloadError, cities, names, prose, prose_with_facts

SCORED_TOKENS = 32
"""Tokens of prose that `perplexity` scores in each case."""
LONGEST_ANSWER = 8
"""Tokens of an answer, at most: the names and cities have one to three."""


@dataclass(frozen=True)
class Turn:
    """A token that is fed, and the tokens that have to follow, each fed in turn whatever was said instead."""

    token: int
    expected: tuple[int, ...]

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens that are fed: each is followed by the expected one at its place."""
        return (self.token, *self.expected[:-1])


@dataclass(frozen=True)
class Case:
    """A prompt that is prefilled, and what comes after it."""

    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def num_steps(self) -> int:
        """Tokens that are decoded."""
        return sum(len(turn.expected) for turn in self.turns)


@dataclass(frozen=True)
class Task:
    """How a task is scored, and how its cases are made: make(model, num_tokens, chance)."""

    name: str
    is_text: bool
    make: Callable[[Model, int, random.Random], Case]


def text_cases(model: Model, task: str, num_tokens: int, count: int, seed: int = 0) -> list[Case]:
    """Cases of a task, of at most `num_tokens` tokens each. Raises WorkloadError: an unknown task, or no room for it.

    A case depends on its number and not on how many are made.
    """
    if task not in TASKS:
        raise WorkloadError(f"task {task!r} is not one of {', '.join(TASKS)}")
    longest = model.shape.context_length
    if num_tokens > longest:
        raise WorkloadError(f"a context of {num_tokens} tokens is longer than {model.name} takes, which is {longest}")
    chances = (random.Random(f"{task} {num_tokens} {seed} {number}") for number in range(count))
    return [TASKS[task].make(model, num_tokens, chance) for chance in chances]


def _needle(model: Model, num_tokens: int, chance: random.Random) -> Case:
    city, name = chance.choice(cities), chance.choice(names)
    return _asked(model, num_tokens, chance, [_pet("grandmother", city, "cat", name)], 0)


def _multi_key(model: Model, num_tokens: int, chance: random.Random) -> Case:
    drawn = zip(*(chance.sample(of, 4) for of in (kin, cities, pets, names)), strict=True)
    return _asked(model, num_tokens, chance, [_pet(*fact) for fact in drawn], chance.randrange(4))


def _qa(model: Model, num_tokens: int, chance: random.Random) -> Case:
    drawn = zip(*(chance.sample(of, 3) for of in (cities, jobs, pets, people)), strict=True)
    return _asked(model, num_tokens, chance, [_person(*fact) for fact in drawn], chance.randrange(3))


def _perplexity(model: Model, num_tokens: int, chance: random.Random) -> Case:
    tokens = prose(model, num_tokens, chance.randrange(1 << 30))
    held = len(tokens) - SCORED_TOKENS - 1
    if held < 1:
        raise WorkloadError(f"{num_tokens} tokens were asked for; perplexity takes at least {SCORED_TOKENS + 2}")
    return Case(tuple(tokens[:held]), (Turn(tokens[held], tuple(tokens[held + 1 :])),))


@dataclass(frozen=True)
class _Fact:
    """A sentence without its last word, that word, and a question that it answers."""

    beginning: str
    answer: str
    question: str


def _pet(relative: str, city: str, pet: str, name: str) -> _Fact:
    return _Fact(f"My {relative} in {city} has a {pet} whose name is", name, f"What does the text say about {city}?")


def _person(city: str, job: str, pet: str, person: str) -> _Fact:
    return _Fact(f"In {city} there is a {job} with a {pet} whose name is", person, f"Who is the {job} in {city}?")


kin = ("grandmother", "uncle", "sister", "cousin", "neighbor", "teacher", "aunt", "brother")
pets = ("cat", "dog", "horse", "parrot", "rabbit", "goat", "turtle", "pony")
people = ("Maria", "Victor", "Helen", "Oscar", "Nadia", "Felix", "Irene", "Bruno", "Clara", "Hugo", "Julia", "Simon")
jobs = ("baker", "doctor", "farmer", "lawyer", "painter", "pilot", "sailor", "writer", "singer", "dentist")


def _asked(model: Model, num_tokens: int, chance: random.Random, facts: list[_Fact], asked: int) -> Case:
    depths = [(number + chance.random()) / len(facts) for number in range(len(facts))]
    ending = f"\n\nQuestion: {facts[asked].question}\nAnswer: {facts[asked].beginning}"
    sentences = [f"{held.beginning} {held.answer}." for held in facts]
    room = num_tokens - LONGEST_ANSWER
    tokens = prose_with_facts(model, room, sentences, depths, ending, chance.randrange(1 << 30))
    answer: list[int] = model.tokenizer.encode(f" {facts[asked].answer}", add_special_tokens=False)
    assert 0 < len(answer) <= LONGEST_ANSWER, "the answers are short words"
    return Case(tuple(tokens[:-1]), (Turn(tokens[-1], tuple(answer)),))


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task("needle", False, _needle),
        Task("multi-key", False, _multi_key),
        Task("qa", False, _qa),
        Task("perplexity", True, _perplexity),
    )
}
