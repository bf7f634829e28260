"""The zoo: its file and the built-in zoos, entries, their models and inputs, and the plan of cases."""
