"""Profiles: devices as TOML files, with a source for every constant (emulators/profile.py)."""
