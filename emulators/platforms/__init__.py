"""Platforms: whole machines as TOML files (devices/platform_file.py), found by the registry."""
