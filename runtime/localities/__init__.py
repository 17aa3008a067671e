"""Locality models that ship: JSON files made by tools/fit_locality.py, which says how (runtime/locality.py)."""
