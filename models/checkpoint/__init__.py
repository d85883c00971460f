"""Model directories: weights, JSON files, tokenizer and vocabulary, read and checked."""
