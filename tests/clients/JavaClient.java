import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.stream.Collectors;

/**
 * The JDK's own client as it is: it asks for HTTP/2 with every request to http://.
 *
 * <p>`java JavaClient.java URL BODY STREAMED_BODY` posts a body of known length, one in chunks, and
 * one whose answer is a stream, gets a list, and prints the status of each and the stream's lines.
 */
class JavaClient {
  public static void main(String[] args) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    URI chat = URI.create(args[0] + "/v1/chat/completions");
    byte[] body = args[1].getBytes("UTF-8");
    var chunks = BodyPublishers.ofInputStream(() -> new java.io.ByteArrayInputStream(body));
    for (var publisher : new HttpRequest.BodyPublisher[] {BodyPublishers.ofByteArray(body), chunks}) {
      System.out.println(client.send(post(chat, publisher), BodyHandlers.ofString()).statusCode());
    }
    var streamed =
        client.send(post(chat, BodyPublishers.ofString(args[2])), BodyHandlers.ofLines());
    System.out.println(streamed.statusCode());
    HttpRequest models = HttpRequest.newBuilder(URI.create(args[0] + "/v1/models")).build();
    System.out.println(client.send(models, BodyHandlers.ofString()).statusCode());
    System.out.print(streamed.body().collect(Collectors.joining("\n")));
  }

  static HttpRequest post(URI uri, HttpRequest.BodyPublisher body) {
    return HttpRequest.newBuilder(uri).header("content-type", "application/json").POST(body).build();
  }
}
