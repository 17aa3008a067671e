"""Tests that run in a guest (tools/guest), on a real kernel: `tierloop guest test`. The host's run leaves them out."""
