"""What type checkers make of the package, as a user's script sees it."""
