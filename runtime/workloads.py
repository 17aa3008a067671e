"""Workloads made of text: what a model is asked, and the answer that shows whether it read all of it.

Who calls this: the command line, the demo and tests. A needle prompt is real English (the prose of Python's language
reference, which ships with Python) with one fact hidden in it and a question about the fact at its end: a cache that
loses the fact's block loses the answer. What must hold: the same arguments give the same tokens under the same Python
version and tokenizer; `token_ids` is what the tokenizer makes of `prompt`; a prompt that does not fit the model,
together with the tokens that it is to answer, is a `WorkloadError` and is never cut.
"""

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tierloop.runtime.models import Model

NEW_TOKENS = 24  # the room that is left for an answer unless the caller says otherwise
MAX_FILE_NBYTES = 64 << 20
cities = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Dublin", "Prague", "Nairobi")
names = ("Lantern", "Orchid", "Violin", "Glacier", "Saffron", "Walnut", "Harbor", "Falcon", "Copper", "Meadow")


class WorkloadError(ValueError):
    """The workload cannot be made, or does not fit the model; the message says what was asked and what is allowed."""


@dataclass(frozen=True)
class Workload:
    """One prompt; `question`, `fact` and `answer` are empty where nothing is known about its text."""

    prompt: str
    token_ids: list[int]
    question: str = ""
    fact: str = ""
    answer: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def is_answered_by(self, text: str) -> bool:
        """Whether `text`, what the model said, holds the answer, in any case and as a word of its own."""
        whole = rf"(?<!\w){re.escape(self.answer)}(?!\w)"
        return bool(self.answer) and re.search(whole, text, re.IGNORECASE) is not None


def needle_prompt(
    model: Model, num_tokens: int = 4096, depth: float = 0.5, seed: int = 0, new_tokens: int = NEW_TOKENS
) -> Workload:
    """A prompt of `num_tokens` tokens, or as many more as one word takes, with a fact near `depth` (0 start, 1 end).

    `seed` chooses the fact and where in the haystack the text starts. SmolLM2-135M-Instruct, decoding greedily in
    float32, gives the answer as its first word: seeds 0 to 4 at depths 0.25, 0.5 and 0.75, and up to 8,000 tokens.
    """
    if not 0 <= depth <= 1:
        raise WorkloadError(f"depth {depth} is outside [0, 1]")
    chance = random.Random(seed)
    fact, question, beginning, answer = _needle(chance)
    asked = f"\n\nQuestion: {question}\nAnswer: {beginning}"
    first = chance.randrange(len(_paragraphs()))

    def hidden(num_words: int) -> str:
        return _with_paragraph(" ".join(hay[:num_words]), fact, depth) + asked

    least = len(_token_ids(model, fact + asked))
    if num_tokens < least:
        raise WorkloadError(f"{num_tokens} tokens were asked for, the fact and its question alone take {least}")
    _check_fits(model, num_tokens, new_tokens)
    hay = _words(first, num_tokens)
    num_words = bisect_left(range(len(hay)), num_tokens, key=lambda count: len(_token_ids(model, hidden(count))))
    prompt = hidden(num_words)
    token_ids = _token_ids(model, prompt)
    _check_fits(model, len(token_ids), new_tokens)
    return Workload(prompt, token_ids, question, fact, answer)


def prose_with_facts(
    model: Model, num_tokens: int, facts: Sequence[str], depths: Sequence[float], ending: str, first: int
) -> list[int]:
    """As much prose as fits into `num_tokens` tokens, with paragraphs `facts` hidden at `depths`, and `ending` last.

    The text starts at paragraph `first`, counted around the haystack. Raises WorkloadError where the facts alone do not
    fit.
    """

    def hidden(num_words: int) -> list[int]:
        text = " ".join(hay[:num_words])
        for fact, depth in zip(facts, depths, strict=True):
            text = _with_paragraph(text, fact, depth)
        return _token_ids(model, text + ending)

    least = len(_token_ids(model, "\n\n".join(facts) + ending))
    if num_tokens < least:
        raise WorkloadError(f"{num_tokens} tokens were asked for, the facts and the question alone take {least}")
    hay = _words(first % len(_paragraphs()), num_tokens)
    num_words = bisect_right(range(1, len(hay)), num_tokens, key=lambda count: len(hidden(count)))
    return hidden(num_words)


def prose(model: Model, num_tokens: int, first: int) -> list[int]:
    """Exactly `num_tokens` tokens of prose from paragraph `first` on, counted around the haystack."""
    return _token_ids(model, " ".join(_words(first % len(_paragraphs()), num_tokens)))[:num_tokens]


def text_prompt(model: Model, text: str, new_tokens: int = NEW_TOKENS) -> Workload:
    """The user's own text as it stands, to be completed: no chat template is put around it."""
    if not text.strip():
        raise WorkloadError("the prompt is empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise WorkloadError(f"the prompt is not Unicode text: {error}") from error
    token_ids = _token_ids(model, text)
    _check_fits(model, len(token_ids), new_tokens)
    return Workload(text, token_ids)


def read_prompt_file(path: str | Path) -> str:
    """The UTF-8 text in the file at `path`, without the line break that editors put at its end."""
    try:
        with Path(path).expanduser().open("rb") as file:
            stored = file.read(MAX_FILE_NBYTES + 1)  # whatever it is, a device without an end included
    except OSError as error:
        raise WorkloadError(f"{path}: cannot be read as a prompt: {error.strerror}") from error
    if len(stored) > MAX_FILE_NBYTES:
        raise WorkloadError(f"{path}: holds more than {MAX_FILE_NBYTES} bytes, the most that a prompt may have")
    try:
        text = stored.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: is not UTF-8 text: byte {error.start} is {stored[error.start]:#04x}") from error
    if not text.strip():
        raise WorkloadError(f"{path}: the prompt is empty")
    return text.removesuffix("\n").removesuffix("\r")


def filler(model: Model, num_tokens: int) -> list[int]:
    """Exactly `num_tokens` tokens of haystack from its start, with no needle and no beginning-of-sequence token."""
    token_ids: list[int] = model.tokenizer.encode(
        " ".join(_words(0, num_tokens)), add_special_tokens=False, verbose=False
    )
    return token_ids[:num_tokens]


def _needle(chance: random.Random) -> tuple[str, str, str, str]:
    """A fact, a question, how its answer begins, and the word that must follow.

    Chosen by experiment. Probability of the right word at 4,100 tokens in one and the same haystack: a fact as from a
    story (this one) 0.74; "The secret code word of Prague is" 0.06 to 0.2. A number is lost after a digit or two, and
    without the beginning of the answer the model talks about Python.
    """
    city, name = chance.choice(cities), chance.choice(names)
    beginning = f"My grandmother in {city} has a cat whose name is"
    return f"{beginning} {name}.", f"What does the text say about {city}?", beginning, name


def _with_paragraph(text: str, paragraph: str, depth: float) -> str:
    """`text` with `paragraph` put in at the border of two paragraphs that is nearest to `depth`."""
    borders = [0, *(found.end() for found in re.finditer("\n\n", text)), len(text)]
    border = min(borders, key=lambda border: abs(border - depth * len(text)))
    before, after = text[:border].rstrip("\n"), text[border:]
    return "\n\n".join(part for part in (before, paragraph, after) if part)


def _token_ids(model: Model, text: str) -> list[int]:
    token_ids: list[int] = model.tokenizer.encode(text, verbose=False)  # verbose warns of a long text; we refuse it
    return token_ids


def _check_fits(model: Model, num_tokens: int, new_tokens: int) -> None:
    longest = model.shape.context_length - new_tokens
    if num_tokens > longest:
        raise WorkloadError(
            f"the prompt has {num_tokens} tokens and {new_tokens} more are to be generated: "
            f"{model.name} takes {model.shape.context_length}, which leaves {max(0, longest)} for the prompt"
        )


def _words(first: int, num_tokens: int) -> list[str]:
    """As many words as make `num_tokens` tokens or more, from paragraph `first` on and around the end if need be."""
    paragraphs = _paragraphs()
    once = "\n\n".join((*paragraphs[first:], *paragraphs[:first])).split(" ")
    whole = "\n\n".join([" ".join(once)] * (1 + num_tokens // len(once)))  # a word is at least one token
    return whole.split(" ")[:num_tokens]


@cache
def _paragraphs() -> tuple[str, ...]:
    """The prose of the language reference: no headings, grammar, code, lists or tables, and no paragraph twice."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise WorkloadError("this Python was installed without pydoc_data, which the haystack is made of") from error
    paragraphs: dict[str, None] = {}
    for name in sorted(topics):
        for block in topics[name].split("\n\n"):
            prose = re.sub(r"[*`“”\"]", "", " ".join(block.split()))
            if (
                re.match("[A-Z]", block)
                and "\n" in block.strip()
                and re.search("[.:]$", prose)
                and not re.search(r"::=|>>>|===|\||\*\*\*", block)
            ):
                paragraphs[prose] = None
    return tuple(paragraphs)
