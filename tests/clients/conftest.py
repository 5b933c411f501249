"""Third-party clients of a replaced model: what they get must equal what they get of the original."""
