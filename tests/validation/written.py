"""Tables of runs as they are read back from a folder."""

from validation import store


def table_of(records, run, folder):
    store.write_table(store.table_of(records, run), folder)
    return store.read_run(folder)
