"""The small model that ships with the project: its drawn world, how it was trained, and how well it obeys."""
