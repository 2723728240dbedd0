"""One file per data set; each registers a function that returns a DataSet."""
