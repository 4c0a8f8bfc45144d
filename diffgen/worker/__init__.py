"""One rank's work: a pipeline's stages, run unit by unit through the ParallelExecutor."""
