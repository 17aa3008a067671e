"""tierloop: long-context LLM attention over tiered memory, on real or emulated devices."""

__version__ = "0.1.0"
