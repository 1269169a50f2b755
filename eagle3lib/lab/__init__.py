"""What every phase shares: parameters, the run folder, findings, files, processes, the runner."""
