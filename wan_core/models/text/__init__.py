"""The text encoder: prompts -> rows of features that the transformer attends to."""
