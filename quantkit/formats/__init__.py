"""File formats: each module writes one, reads it back and says what it cannot read."""
