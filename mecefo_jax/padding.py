"""What the data and the model agree on about padding."""

PAD = -1
"""Token id of padding: read as id 0 where it is an input, ignored where it is a target; never in a vocabulary."""
