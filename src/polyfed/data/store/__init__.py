"""Files and archives, the cache of decoded images, and the examples of a domain."""
