"""What of NELSSA (arXiv 2607.26633) is reproduced: N1 to N11 of its numbers, and what its reviewers asked.

docs/reproduction.md says what each check compares and what cannot be had here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from tierloop.runtime.reproduction import Check, System
from tierloop.runtime.study import Study
from tierloop.tools import reproducing_nelssa_counts as counts
from tierloop.tools import reproducing_nelssa_migration as migration
from tierloop.tools import reproducing_nelssa_model as model
from tierloop.tools import reproducing_nelssa_questions as questions
from tierloop.tools import reproducing_nelssa_serving as serving
from tierloop.tools import reproducing_nelssa_time as time
from tierloop.tools.reproducing_nelssa_constants import frozen


def system() -> System:
    """NELSSA's constants, checks and questions."""
    checks = {
        "N1": time.crossovers,
        "N2": time.throughput,
        "N3": time.breakdown,
        "N4": serving.short_requests,
        "N5": serving.batches,
        "N6": migration.migration,
        "N7": model.selection_ratio,
        "N8": counts.partitions,
        "N9": counts.capacity,
        "N10": migration.occupancy,
        "N11": model.incremental,
    }
    once = {name: _once(name, check) for name, check in checks.items()}
    return System(
        "nelssa",
        frozen(),
        once,
        {
            "classification": questions.classification(once),
            "throughput": questions.throughput,
            "thresholds": questions.thresholds,
            "contention": questions.contention,
            "capacities": questions.capacities,
            "accuracy": questions.accuracy,
            "energy": questions.energy,
            "layer-sampling": questions.layer_sampling,
        },
    )


def _once(name: str, check: Callable[[Study], Check]) -> Callable[[Study], Check]:
    """The check, made once for itself and for the table that classifies its numbers."""
    return lambda study: cast("Check", study.once(f"check {name}", lambda: check(study)))
