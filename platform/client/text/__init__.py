"""Text and tokens: chat templates, detokenizer, stop strings."""
