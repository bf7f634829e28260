"""The zoo: its file and the zoos that are built in, entries, models and inputs made of them, and the plan of cases."""
