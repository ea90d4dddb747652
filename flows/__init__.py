"""When it runs: Prefect flows and the `bookwheel` command line. No algorithm, no DoFn and no record lives here."""
