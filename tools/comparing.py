"""What `run`, `compare` and `demo` have in common: load, open, compare, and leave the files that were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierloop.devices.errors import ConfigurationError, nearest
from tierloop.devices.kernels.contract import DTYPES
from tierloop.devices.platform import Platform
from tierloop.devices.self_test import forget, start_up_test
from tierloop.runtime.manifest import manifest
from tierloop.runtime.results import Comparison
from tierloop.runtime.trace import TraceRecorder
from tierloop.tools import options
from tierloop.tools.console import Results, progress, say
from tierloop.tools.exits import end
from tierloop.tools.output import OutputError, place_named_twice, prepare_file, write_files
from tierloop.tools.report import report
from tierloop.tools.table import policies_table, remarks, use_table

if TYPE_CHECKING:  # torch takes seconds to import, and `tierloop --help` needs none of it
    from tierloop.runtime.compare import PolicyRequest
    from tierloop.runtime.models import Model
    from tierloop.runtime.selection import SelectionRecord
    from tierloop.runtime.workloads import Workload


@dataclass(frozen=True)
class Asked:
    """What the user asked for; it goes into the manifest as it stands."""

    model: str = "smollm2-135m"
    platform: str = "demo"
    clock: str | None = None
    dilation: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    prompt_file: Path | None = None
    prompt_tokens: int = 4096
    depth: float = 0.5
    seed: int = 0
    tokens: int = 16
    kv_dtype: str = "float32"
    oracle: bool = True
    cache: Path | None = None
    self_test: bool = True

    def check(self) -> None:
        """What can be seen to be wrong before anything slow begins. Raises ConfigurationError."""
        options.clock_kind(self.clock)
        if self.kv_dtype not in DTYPES:
            raise ConfigurationError(f"--kv-dtype {self.kv_dtype!r}: {nearest(self.kv_dtype, sorted(DTYPES))}")
        if self.clock == "virtual" and (self.dilation or 1) != 1:
            raise ConfigurationError(
                "--dilation: only a wall clock is dilated; virtual time needs no help from the host"
            )

    def open(self, changes: Mapping[str, Any] | None = None) -> Platform:
        """A fresh platform; `changes` are further overrides. Raises ConfigurationError or a DeviceError."""
        from tierloop.devices.registry import open_platform

        return open_platform(
            self.platform,
            clock=options.clock_kind(self.clock),
            dilation=self.dilation,
            overrides={**self.overrides, **(changes or {})},
        )

    def try_out(self) -> None:
        """Open the platform, test what is real of it, and close it. Raises ConfigurationError or a DeviceError."""
        try_out(self.open(), self.self_test)

    def load(self) -> tuple[Model, Workload]:
        """The model and the prompt. Raises ModelError or WorkloadError."""
        from tierloop.runtime.models import load_model
        from tierloop.runtime.workloads import needle_prompt, read_prompt_file, text_prompt

        text = read_prompt_file(self.prompt_file) if self.prompt_file is not None else None
        model = load_model(self.model, self.cache)
        if text is not None:
            return model, text_prompt(model, text, new_tokens=self.tokens)
        return model, needle_prompt(model, self.prompt_tokens, depth=self.depth, seed=self.seed, new_tokens=self.tokens)

    def described(self, comparison: Comparison, platform: Platform, policies: Sequence[PolicyRequest]) -> Comparison:
        """The comparison with its manifest."""
        config = {
            **{name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items() if name != "cache"},
            "policies": [asdict(policy) for policy in policies],
        }
        if self.prompt_file is not None:
            config["prompt_file"] = self.prompt_file.name
        return replace(comparison, manifest=manifest(config, platform, self.seed))


def compare_policies(
    asked: Asked,
    policies: Sequence[PolicyRequest],
    trace: TraceRecorder | None,
    selections: list[SelectionRecord] | None = None,
) -> Comparison:
    """Run the policies on what was asked for, with progress on stderr; `selections` gets what each decided by."""
    from tierloop.runtime.compare import compare, find_policy
    from tierloop.runtime.policy import check_options

    asked.check()
    for policy in policies:
        check_options(find_policy(policy.name), policy.options)
    asked.try_out()  # a wrong platform is known before the model is loaded
    say(f"loading {asked.model}")
    model, workload = asked.load()
    opened: list[Platform] = []

    def fresh(_: PolicyRequest) -> Platform:
        opened.append(asked.open())
        return opened[-1]

    with progress() as shown:
        comparison = compare(
            model,
            workload,
            fresh,
            policies,
            num_tokens=asked.tokens,
            kv_dtype=asked.kv_dtype,
            oracle=asked.oracle,
            progress=shown,
            trace=trace,
            selections=selections,
        )
    return asked.described(comparison, opened[-1], policies)


def try_out(platform: Platform, self_test: bool) -> None:
    """Test the real tiers of a platform, say on stderr what could not be tested, and close it; nothing is recorded.

    Without `self_test` it was only opened, which says that it can be. Raises a DeviceError.
    """
    with platform:
        for tested in start_up_test(platform) if self_test else ():
            if tested.remark:
                say(f"self-test: {tested.memory}: {tested.remark}")
        forget(platform)


def prepare_files(*files: Path | None) -> None:
    """See that every file that was asked for can be written, before the work. Raises OutputError."""
    wanted = [file for file in files if file is not None]
    for file in wanted:
        prepare_file(file)
    twice = place_named_twice(wanted)
    if twice is not None:
        raise OutputError(f"{twice}: is named for two outputs; give each a file of its own")


def leave_files(
    comparison: Comparison, trace: TraceRecorder | None, trace_file: Path | None, report_file: Path | None
) -> None:
    """Write the trace and the report. Raises OutputError."""
    texts = {}
    if trace is not None and trace_file is not None:
        texts[trace_file] = trace.to_json()
    if report_file is not None:
        title = f"tierloop: {comparison.model} on {comparison.platform}"
        texts[report_file] = report(title, "", [comparison], comparison.failures)
    write_files(texts)
    for file in texts:
        say(f"wrote {file}")


def show(shown: Results, comparison: Comparison) -> None:
    """The tables and remarks of a comparison."""
    shown.show(policies_table(comparison), use_table(comparison), *(escaped(line) for line in remarks(comparison)))


def escaped(text: str) -> Any:
    """A line that is shown as it stands."""
    from rich.text import Text

    return Text(text)


def verdict(failures: Sequence[str], comparisons: Sequence[Comparison]) -> None:
    """End with exit code 1 if a check failed, 3 if a run was invalid. Raises typer.Exit."""
    end(failures, [f"{c.platform}: {r.policy}: {r.invalid[0]}" for c in comparisons for r in c.policies if r.invalid])
