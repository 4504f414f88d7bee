"""Corpora on disk, in Megatron's .bin/.idx."""
