"""Read layers from their own graphs: blocks for classes without a written spec."""
