"""From files and archives to decoded images, which are kept on disk, and to the examples of a domain."""
