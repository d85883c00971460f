"""EAGLE heads: a decoder layer that drafts from the target's hidden states."""
