"""Layers with a recurrent state, in place of attention or alongside it.

A state is that of a sequence after a number of leading tokens, its length. It has a fixed size: the last inputs of a
convolution, and for some layers a matrix for each head. States lie in slots (`memory.LayerStates`); a row of a pass
reads one slot and writes those of its last lengths, so that rejected drafts need no rollback: the next row reads the
slot of the length that was accepted (`platform.core.batch.RowStates`).
"""
