"""When it runs: Prefect flows and the `bookwheel` command line. No algorithm and no DoFn lives here."""
