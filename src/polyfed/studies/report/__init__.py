"""Tables, figures and reports from run folders."""
