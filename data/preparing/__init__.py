"""Texts become a corpus on disk."""
