"""A user's job on ranks: found, launched, built, trained, planned again."""
