"""Presets: what each model can do, as data. `tiny/` is the small model that ships with the project."""
