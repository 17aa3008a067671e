"""What of KVDrive (arXiv 2605.18071) is reproduced: K1 to K12 of its numbers, and what its reviewers asked.

docs/reproduction.md says what each check compares and what cannot be had here.
"""

from __future__ import annotations

from tierloop.runtime.reproduction import System
from tierloop.tools import reproducing_kvdrive_counts as counts
from tierloop.tools import reproducing_kvdrive_questions as questions
from tierloop.tools import reproducing_kvdrive_time as time
from tierloop.tools import reproducing_kvdrive_traces as traces
from tierloop.tools.reproducing_kvdrive_constants import frozen


def system() -> System:
    return System(
        "kvdrive",
        frozen(),
        {
            "K1": traces.windows_and_transfer,
            "K2": traces.look_ahead,
            "K3": traces.sizing,
            "K4": counts.throughput,
            "K5": time.breakdown,
            "K6": time.window_by_batch,
            "K7": time.index,
            "K8": time.on_ssd,
            "K9": time.small_gpu,
            "K10": counts.roofline,
            "K11": time.pipelines,
            "K12": counts.capacity,
        },
        {
            "throughput": questions.throughput,
            "stalls": questions.stalls,
            "placement-error": questions.placement_error,
            "sparsity": questions.sparsity,
            "tiers": questions.tiers,
            "drives": questions.drives,
            "contexts": questions.contexts,
            "look-ahead": questions.look_ahead,
        },
    )
