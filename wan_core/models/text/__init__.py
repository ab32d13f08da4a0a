"""The text encoder: prompts -> feature rows, to which the transformer attends."""
