"""pytest plugin: inert without `--backend`."""
