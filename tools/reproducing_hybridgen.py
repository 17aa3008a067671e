"""What of HybridGen (arXiv 2604.18529) is reproduced: H1 to H9 of its numbers, and what its reviewers asked.

docs/reproduction.md says what each check compares and what cannot be had here.
"""

from __future__ import annotations

from tierloop.runtime.reproduction import System
from tierloop.tools import reproducing_hybridgen_counts as counts
from tierloop.tools import reproducing_hybridgen_model as model
from tierloop.tools import reproducing_hybridgen_questions as questions
from tierloop.tools import reproducing_hybridgen_scheduler as scheduler
from tierloop.tools import reproducing_hybridgen_time as time
from tierloop.tools.reproducing_hybridgen_constants import frozen


def system() -> System:
    """HybridGen's constants, checks and questions."""
    return System(
        "hybridgen",
        frozen(),
        {
            "H1": counts.flops,
            "H2": counts.crossover,
            "H3": time.cpu_or_gpu,
            "H4": model.similarity,
            "H5": time.speedup,
            "H6": time.mapping,
            "H7": scheduler.feedback,
            "H8": counts.traffic,
            "H9": time.scaling,
        },
        {
            "stages": questions.stages,
            "scaling": questions.scaling,
            "sensitivity": questions.sensitivity,
            "prediction-error": questions.prediction_error,
            "shared-pool": questions.shared_pool,
            "speed-up": questions.speed_up,
        },
    )
