"""HTTP: the endpoints, their JSON, the web page, and the process around them."""
