"""What every layer may use: errors, units, files, and the way to the compiled module. Standard library only."""
