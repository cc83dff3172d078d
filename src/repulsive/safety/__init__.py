"""What protects the user from files, names and processes that are not trustworthy. One place for each."""
